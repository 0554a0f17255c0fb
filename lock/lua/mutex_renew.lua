-- Prolong the lease, if it is still ours. Nothing is brought back.
--
-- KEYS  1 lock  2 ended attempts
-- ARGV  1 token  2 life of the lease, ms
--
-- Returns 1 prolonged, 0 lost.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', 0) -- a write, so that a replica does not answer: what it knows may be old
  return 0
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
