CREATE TABLE IF NOT EXISTS accounts (
    id      BIGINT PRIMARY KEY,
    balance BIGINT NOT NULL,
    fence   BIGINT NOT NULL
);
