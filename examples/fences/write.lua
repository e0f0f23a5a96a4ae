-- KEYS[1] the account, a hash   ARGV[1] fence   ARGV[2] balance
-- replies 1: written, or 0: a fence as high or higher was here before
local seen = tonumber(redis.call('HGET', KEYS[1], 'fence') or '0')
if tonumber(ARGV[1]) <= seen then return 0 end
redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'balance', ARGV[2])
return 1
