"""``specdec plan``: the speed of a deployment, how much to draft and how many drafts, by the formula of the policy.

Imports core and speculation; runs no model and opens no socket.
Start at deployment.py.
"""
