"""Operations on tensors: each a contract, a plain reference, backends. Imports nothing of ours."""
