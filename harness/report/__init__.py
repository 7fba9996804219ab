"""What a run leaves to read: tables, a page with pictures, Markdown, JUnit; runs read back, merged and compared."""
