"""ctx.log_image and ctx.log_table."""
