-- The holder is done; it gave up its belief before this was sent.
-- KEYS lock queue fence polls   ARGV token provisional_ms
-- replies "released" | "not ours" | "again"
local value = redis.pcall('GET', KEYS[1])
if type(value) ~= 'string' or value:sub(7, 38) ~= ARGV[1] then return 'not ours' end
if value:sub(5, 5) == '0' then
  redis.call('DEL', KEYS[1])
  return 'released'
end
--#head
return pass_on(tonumber(ARGV[2])) and 'released' or 'again'
