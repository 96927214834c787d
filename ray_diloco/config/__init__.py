"""Configuration: schema, composition from files and arguments, checks, and the commented print."""
