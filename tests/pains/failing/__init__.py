"""Problems with ranks that fail, hang or are lost."""
