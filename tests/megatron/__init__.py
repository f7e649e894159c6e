"""Tests of the decision and execution of loads in a live Megatron job."""
