"""Operations on tensors, each a contract, a plain reference and backends; imports nothing of ours."""
