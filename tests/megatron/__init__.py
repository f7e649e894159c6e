"""Tests of what decides and carries out the loads of a live Megatron job."""
