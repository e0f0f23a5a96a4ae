-- Releases a lock that another kind of client wrote as a plain value, unless it has waiters.
-- KEYS lock queue   ARGV the value
-- replies "released" | "not ours" | "waited for": nothing was done, send an evict
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'not ours' end
if redis.call('EXISTS', KEYS[2]) == 1 then return 'waited for' end
redis.call('DEL', KEYS[1])
return 'released'
