-- Prolong the lease, if it is still ours. Nothing is brought back.
--
-- KEYS  1 lock
-- ARGV  1 token  2 life of the lease, ms
--
-- Returns 1 prolonged, 0 lost.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
