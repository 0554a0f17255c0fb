-- Give up an attempt: give back what it took and what it reserved, and refuse it if it is still on its way.
--
-- KEYS  1 lock  2 ended attempts  3 reservation
-- ARGV  1 token  2 how long the attempt is known to have ended, ms  3 how many such attempts are known
--
-- Returns 1 released, 0 it held nothing.

local time = redis.call('TIME')
local ms = math.floor((tonumber(time[1]) * 1000000 + tonumber(time[2])) / 1000)
local taken = 0
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  taken = 1
end
if string.sub(redis.call('GET', KEYS[3]) or '', -#ARGV[1]) == ARGV[1] then redis.call('DEL', KEYS[3]) end
local life = math.max(redis.call('PTTL', KEYS[2]), ARGV[2])
redis.call('PEXPIRE', KEYS[2], life) -- if this right is missing, nothing is to be left without an end
redis.call('ZADD', KEYS[2], string.format('%.0f', ms + ARGV[2]), ARGV[1])
redis.call('PEXPIRE', KEYS[2], life)
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - ARGV[3])
return taken
