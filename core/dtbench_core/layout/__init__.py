"""How a tensor is spread over a mesh: placements, specs, the mesh, the layout of shards, random numbers by layout."""
