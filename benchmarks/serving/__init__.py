"""Parts of the load generator: what is asked, the client, the servers, the report."""
