"""The Ray adapters of the ports in `rounds/`: driver, islands of rank actors, anchor shards, durable commits."""
