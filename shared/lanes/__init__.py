"""Ways for bytes to travel beside the bus: `put -> Ticket`, `get(Ticket)`."""
