"""What makes other libraries call our kernels; nothing here is imported by the package itself."""
