"""One module per owner: the service that receives the request, or publishes the event."""
