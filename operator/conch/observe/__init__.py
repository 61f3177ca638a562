"""What the operator tells about itself."""
