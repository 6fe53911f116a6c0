"""What a collective costs on a mesh dim, from constants or measurements, and the cheapest chain of them."""
