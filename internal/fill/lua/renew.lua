-- Prolong the lock, if it is still ours.
--
-- KEYS  1 lock
-- ARGV  1 token  2 life of the lock, ms
--
-- Returns 1 prolonged, 0 lost.

local lock = redis.pcall('GET', KEYS[1])
if type(lock) ~= 'string' or string.sub(lock, 1, 27) ~= 'H' .. ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
