"""Why a rank is slow: its signals compared with those of its peers, and with its own before. Pure."""
