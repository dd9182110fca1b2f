"""Which images there are, and how they are split."""
