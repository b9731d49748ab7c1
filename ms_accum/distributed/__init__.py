"""How ranks meet, and what they exchange."""
