"""The command line interface: one module per command. No other package prints."""
