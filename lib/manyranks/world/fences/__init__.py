"""What ranks that run code of strangers are fenced with."""
