"""How many layers each stage holds: layout text, costs of parts, balanced layouts."""
