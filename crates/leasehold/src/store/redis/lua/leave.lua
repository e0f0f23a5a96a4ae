-- An attempt is given up wherever it stands; its token is dead once this is sent.
-- KEYS lock queue fence polls   ARGV token inbox ttl_ms since_ms owner provisional_ms
-- replies "waiting"   it stood in line, or was unknown
--         "granted"   the grant had crossed it: handed on
--         "again"
redis.call('ZREM', KEYS[2], ARGV[1] .. ' ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[4] .. ' ' .. ARGV[5])
if ARGV[2] == '-' then redis.call('HDEL', KEYS[4], ARGV[1]) end
local value = redis.pcall('GET', KEYS[1])
if type(value) ~= 'string' or value:sub(7, 38) ~= ARGV[1] then return 'waiting' end
--#head
return pass_on(tonumber(ARGV[6])) and 'granted' or 'again'
