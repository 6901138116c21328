"""The user's model as the server sees it: names, layout, replica."""
