"""What ranks exchange, and when. Every other room may import it; it imports the shared files alone."""
