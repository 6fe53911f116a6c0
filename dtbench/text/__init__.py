"""How things are written: units, terminal tables, masked secrets."""
