-- Another kind of client's lock, which it wrote as a plain value, is given back where nobody waits for it.
-- KEYS lock queue   ARGV the value
-- replies "released" | "not ours" | "waited for": nothing was done, hand it over by an evict
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'not ours' end
if redis.call('EXISTS', KEYS[2]) == 1 then return 'waited for' end
redis.call('DEL', KEYS[1])
return 'released'
