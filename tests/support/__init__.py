"""What tests share: networks, data, oracles, and programs that run in processes of their own."""
