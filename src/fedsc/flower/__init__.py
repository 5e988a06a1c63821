"""Federations across machines, on Flower: the only place that imports flwr.

The server is a `Federation` whose engine asks nodes instead of training (`server.py`); a node is a
`Federation` of which one client is here (`client.py`). Methods, plan, checks, evaluation and run
folders are the same as on one machine.
"""
