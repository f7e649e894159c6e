"""Operations on checkpoints without a job: conversion, inspection, verification, comparison."""
