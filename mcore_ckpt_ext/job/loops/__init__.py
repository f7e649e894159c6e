"""How training loops other than Megatron's describe their jobs: tables of names, pure and without their code."""
