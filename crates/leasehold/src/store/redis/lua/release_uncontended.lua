-- Releases a lock that probably has no waiter: one key, one argument.
-- KEYS lock   ARGV "0 " and the token: what follows "lh1 " in the value if it is ours and has no waiter
-- replies "released" | "not ours" | "waited for": nothing was done, send a release
local value = redis.call('GET', KEYS[1])
if value and value:sub(5, 38) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  return 'released'
end
if not value or value:sub(7, 38) ~= ARGV[1]:sub(3) then return 'not ours' end
return 'waited for'
