"""Runs the fault table: real services around table models, broken on purpose. Knows faults and their pass criteria;
does not know how the services survive them."""
