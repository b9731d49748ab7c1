"""The exchange between ranks. Every other room may import it; it imports only the shared files."""
