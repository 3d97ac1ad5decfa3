"""An engine on several hosts: what ``stagetap serve`` on each of them tells the others."""
