-- Gives up an attempt, in the queue or as the holder. Its token is dead once this is sent.
-- KEYS lock queue fence polls   ARGV token inbox ttl_ms since_ms owner provisional_ms
-- replies "waiting"   it was in the queue, or was unknown
--         "granted"   it had been granted the lock meanwhile: passed on
--         "again"
-- If another client replaced the queue by a value of another type, the lock is given back all the same.
local me = ARGV[1] .. ' ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[4] .. ' ' .. ARGV[5]
local left = redis.pcall('ZREM', KEYS[2], me)
if type(left) == 'table' and not left.err:find('^WRONGTYPE') then return left end
if ARGV[2] == '-' then redis.pcall('HDEL', KEYS[4], ARGV[1]) end
local value = redis.pcall('GETRANGE', KEYS[1], 0, 37) -- up to the end of the token
if type(value) ~= 'string' or value:sub(7, 38) ~= ARGV[1] then return 'waiting' end
--#head
return pass_on(tonumber(ARGV[6])) and 'granted' or 'again'
