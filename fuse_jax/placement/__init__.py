"""Where things live: device meshes, and which parameter axis is cut over which mesh axis."""
