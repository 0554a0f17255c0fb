-- Prolong the lock if this attempt still holds it.
--
-- KEYS  1 lock
-- ARGV  1 token  2 stamp  3 TTL of the lock, ms
--
-- Returns 1 prolonged, 0 lost.

local lock = redis.pcall('GET', KEYS[1])
if type(lock) ~= 'string' or string.sub(lock, 1, 43) ~= 'H' .. ARGV[1] .. ARGV[2] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
