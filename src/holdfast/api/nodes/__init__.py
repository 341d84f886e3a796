"""This node and the others of its cluster, as the routes of the admin port reach them."""
