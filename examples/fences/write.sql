INSERT INTO accounts (id, balance, fence) VALUES ($2, $3, $1)
ON CONFLICT (id) DO UPDATE SET balance = excluded.balance, fence = excluded.fence
WHERE accounts.fence < $1;
