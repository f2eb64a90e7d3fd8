"""What every service is made of: bus, endpoints with bounded mailboxes, lifecycle, registry."""
