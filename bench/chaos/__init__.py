"""The fault table, run: real services around table models, broken on purpose. Knows faults and their pass criteria;
refuses to know how the services survive them."""
