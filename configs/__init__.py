"""What a user can set: schema, checks and the gin loader. Nothing here imports torch."""
