"""Runs in the ranks of the self-test: small jobs of the installed Megatron, and the state of their objects.

The comparison shares no code with the loader under test: names and positions of parameters are those of Megatron's own
`sharded_state_dict`.
"""
