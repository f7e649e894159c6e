"""What is done with checkpoints without a job: conversion, inspection, verification, comparison."""
