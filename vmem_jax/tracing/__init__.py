"""How a call of the user's becomes a traced step."""
