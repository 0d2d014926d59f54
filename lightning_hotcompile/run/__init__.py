"""One stage of one Trainer call: what the callback knows of it, asks, decides and does."""
