-- A release where nobody is likely to wait: one key, one argument.
-- KEYS lock   ARGV token
-- replies "released" | "not ours" | "waited for": nothing was done, send a release
local value = redis.pcall('GET', KEYS[1])
if type(value) ~= 'string' or value:sub(7, 38) ~= ARGV[1] then return 'not ours' end
if value:sub(5, 5) ~= '0' then return 'waited for' end
redis.call('DEL', KEYS[1])
return 'released'
